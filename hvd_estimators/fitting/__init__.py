"""Steps of a fit. Runs on the driver."""
