"""Every message: a file for each conversation, and the table that decodes them."""
