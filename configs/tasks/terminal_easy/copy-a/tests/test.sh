# Both files exist with the same content.
cmp -s b.txt - <<< $'one\ntwo' && [ -e a.txt ] || exit 1
