"""The compute thread and its devices, and limits on what it uses of the machine."""
