"""Any number of rows as weighted cells, in flat memory."""
