"""A worker that rests: until when, and what stays of it meanwhile."""
