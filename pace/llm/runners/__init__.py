"""How a model's forward pass is computed: recorded as a program, or op by op."""
