"""What runs inside a peer's process. Each function takes tensors by name and returns a call without arguments."""
