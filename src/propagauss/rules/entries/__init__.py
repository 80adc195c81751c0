"""Entries that move without changing: views, indexing, ordering, scatter, and ops that return their input."""
