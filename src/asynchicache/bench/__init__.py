"""What is measured, and how it is shown: each bench beside a limit from the same run."""
