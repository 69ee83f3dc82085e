"""A study on a small encoder that classifies: the kind of model of the paper's language tables."""
