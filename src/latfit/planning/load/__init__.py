"""A load within an SLA: strategies, T_cut, capacity, promises."""
