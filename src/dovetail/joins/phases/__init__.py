"""The phases that strategies are composed of: intake, lookups, scan, visit, and the choice between them."""
