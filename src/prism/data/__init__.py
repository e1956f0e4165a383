"""What models learn from. Text becomes tokens on disk; windows of them are samples whose order has no state."""
