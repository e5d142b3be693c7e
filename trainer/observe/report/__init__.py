"""The report: one HTML page that shows how runs went, from the files that they wrote."""
