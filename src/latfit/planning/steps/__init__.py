"""Steps within an SLA: limits, thresholds, budgets."""
