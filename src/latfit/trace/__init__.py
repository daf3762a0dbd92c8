"""Traces of steps: what they hold (schema, table), where they come from (readers, store), what was dropped (clean)."""
