"""What the trainers of all frameworks share on the ranks; imports no framework."""
