"""Pages made from what is stored."""
