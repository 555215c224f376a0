"""A contribution of several devices that hold a stage together, each of its share of the chunks."""
