"""Training: roles from a plan, the PPO step, the loop around it, checkpoints."""
