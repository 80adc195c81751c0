"""Tables to predict for: files in three formats, read a few rows at a time."""
