"""Ways to predict classes that several experiments compare, and how well they did."""
