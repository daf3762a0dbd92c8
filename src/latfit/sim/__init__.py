"""Request level: batching policies on one or two execution paths, against a load."""
