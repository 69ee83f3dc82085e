"""Tables of lm-eval's scores: normalized accuracy, standard errors and paired tests."""
