"""The command line: arguments in, text or JSON out. What to do is decided elsewhere."""
