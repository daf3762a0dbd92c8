"""How far the parameters of a fit can be trusted, and what would tell more."""
