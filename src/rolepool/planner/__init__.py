"""Predicts how long a step takes under another placement, and searches for the best one, from
recorded runs only."""
