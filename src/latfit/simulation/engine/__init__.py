"""A serving engine simulated step by step, token by token, with step costs from a fit."""
