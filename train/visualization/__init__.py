"""Pages and figures for people: the attention viewer and the report of a run."""
