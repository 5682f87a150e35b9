echo end >> log.txt
