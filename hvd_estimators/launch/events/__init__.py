"""What ranks tell the driver while a job runs, and where it comes out."""
