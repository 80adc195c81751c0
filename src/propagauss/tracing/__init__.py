"""From an `nn.Module` to one flat ATen graph whose parameters, inputs and outputs are named: `trace` is the door."""
