class ExecutorWithExternalLauncher:
    """Only its name is needed by a process without a tensor-parallel group."""
