"""What an experiment is, which there are, running them, and the store of what they found."""
