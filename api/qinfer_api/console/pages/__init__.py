"""The pages: functions that read what a page shows from the gateway's services, and fill its template."""
