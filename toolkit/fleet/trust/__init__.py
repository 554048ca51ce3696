"""Who may say what runs on a board: keys, the signed repository, certificates, signatures."""
