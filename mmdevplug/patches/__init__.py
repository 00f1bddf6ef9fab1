"""Functions of other packages that are replaced while a job runs, and put back."""
