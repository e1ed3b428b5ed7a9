"""Tables and figures of the documentation, declared in ``docs/tables/*.yaml`` and drawn from the records."""
