"""Every example of the pages runs and says what the page says."""
