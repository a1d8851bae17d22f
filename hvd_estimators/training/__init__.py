"""What the trainers of all frameworks have in common, on the ranks; imports no framework."""
