# Both files exist with the same content.
cmp -s copy.txt - <<< $'one\ntwo' && [ -e notes.txt ] || exit 1
