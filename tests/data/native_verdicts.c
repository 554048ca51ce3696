/* Prints the verdict of libtandem on each file that is named on stdin: "valid", or its sentence. */
#include <stdio.h>
#include <string.h>

#include <tandem.h>

int main(void) {
  char path[4096];
  while (fgets(path, sizeof path, stdin) != NULL) {
    tandem_engine* engine = NULL;
    tandem_status status;
    path[strcspn(path, "\n")] = '\0';
    status = tandem_engine_open(path, &engine);
    if (status == TANDEM_OK) status = tandem_engine_verify(engine);
    puts(status == TANDEM_OK ? "valid" : tandem_last_error());
    tandem_engine_close(engine);
  }
  return 0;
}
