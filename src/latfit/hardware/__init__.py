"""A machine as latfit sees it: named execution paths, each with its fit."""
