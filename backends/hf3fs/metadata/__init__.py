"""The service that maps pages to slots of files on 3FS."""
