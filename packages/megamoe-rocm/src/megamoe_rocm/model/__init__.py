"""A model of where time should go on an MI355X. Nothing in it was measured there, and nothing here pretends to be."""
