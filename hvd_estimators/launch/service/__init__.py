"""Services on the driver for what ranks report and commit while a job runs."""
