"""The pass that replaces ops by rules: `rewrite` is the door."""
