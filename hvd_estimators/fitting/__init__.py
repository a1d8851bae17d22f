"""What the recipe of a fit is made of, on the driver."""
