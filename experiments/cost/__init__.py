"""How many samples sampling needs, and how long predictions take."""
