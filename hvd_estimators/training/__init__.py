"""Parts of training on ranks that all frameworks share; imports no framework."""
