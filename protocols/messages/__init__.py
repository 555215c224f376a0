"""All message classes, one file per conversation, and the table that decodes them."""
