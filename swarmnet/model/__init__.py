"""The decoder, the forward and backward pass of a stage, its flat layout, text sampling, and costs."""
