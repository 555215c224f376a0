"""What judges the product; nothing else imports it."""
