"""One p2pd process, and the only file that imports hivemind."""
