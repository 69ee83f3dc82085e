"""`tvb learn`: merges that learn from examples of the tasks. `running` calls the other modules."""
