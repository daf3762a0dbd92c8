"""Results as figures, tables and one page that opens anywhere."""
